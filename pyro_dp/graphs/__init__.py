"""Python code turned into flat graphs, and what it refers to and keeps."""
