"""The agreement by an etcd that the user runs, behind the same port."""
