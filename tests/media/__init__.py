"""Tests of pictures: opening them, and what processors make of them."""
