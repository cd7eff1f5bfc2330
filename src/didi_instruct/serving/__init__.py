"""HTTP server and web page."""
