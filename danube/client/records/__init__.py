"""An application's records on their way in and out of a machine."""
