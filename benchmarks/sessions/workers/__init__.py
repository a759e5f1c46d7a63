"""Many threads for one session: what each packet costs them, and what they would reach."""
