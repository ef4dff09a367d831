"""The law under random schedules of resizes and kills."""
