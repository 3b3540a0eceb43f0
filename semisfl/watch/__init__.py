"""A page that shows runs as they go, or as they went. Reads run directories; changes nothing."""
