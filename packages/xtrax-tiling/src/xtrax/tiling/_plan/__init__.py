"""What a plan is: axes and what was decided about each, as text, HTML and JSON."""
