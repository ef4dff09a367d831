"""Records a second that reach the step."""
