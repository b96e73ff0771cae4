"""What a grammar's text says, and how llguidance is told: GBNF, JSON schemas."""
