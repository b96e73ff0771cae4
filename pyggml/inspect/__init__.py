"""What is drawn and shown of graphs."""
