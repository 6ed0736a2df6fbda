"""torch.save archives."""
