"""Generated from proto/windrow/v1 by ./run gen; never edited."""
