"""Plans of sessions: a model of completion times, and the choice of schemes by it."""
