"""Who serves, and what an operator wishes: kept by one actor, watched by all."""
