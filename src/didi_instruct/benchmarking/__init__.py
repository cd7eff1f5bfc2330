"""Speed: cases timed side by side, and the plain ways of doing things that ours is told against."""
