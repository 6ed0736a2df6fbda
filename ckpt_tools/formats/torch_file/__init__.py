"""One torch.save file."""
