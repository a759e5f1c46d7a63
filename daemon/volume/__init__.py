"""What target and gateway say of a volume: descriptor, events, jobs, store status."""
