"""safetensors files and folders."""
