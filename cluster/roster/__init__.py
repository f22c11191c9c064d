"""The roster: the members that serve, and the counts that operators ordered; kept by one actor, watched by
all."""
