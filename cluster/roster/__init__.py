"""The roster: who serves, and the counts that operators ordered; kept by one actor, watched by all."""
