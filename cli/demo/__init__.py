"""`sealane demo`: the main job on one machine, with its attacks, as an operator would run it."""
