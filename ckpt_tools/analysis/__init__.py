"""What an index tells: mesh, sections, owners, forecasts."""
