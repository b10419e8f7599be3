"""A broker and its cluster: start, stop, config, brokers, recover."""
