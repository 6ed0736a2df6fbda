"""Where bytes are: local paths and addresses of stores."""
