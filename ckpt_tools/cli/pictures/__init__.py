"""Pictures of a checkpoint: for the terminal, and as pages of one file without network.

This room turns holdings and reports into text. It opens no checkpoint.
"""
