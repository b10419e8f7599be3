"""What commands share: words in, words out, errors, exit codes."""
