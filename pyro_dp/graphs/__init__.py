"""Python code turned into flat graphs, with its references and kept state."""
