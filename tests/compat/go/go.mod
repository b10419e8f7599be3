module danube-compat

go 1.23
