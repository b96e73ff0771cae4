"""The model that ships, and how it was trained."""
