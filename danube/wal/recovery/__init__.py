"""Opening a log after any end of its writer, and the small files that help."""
