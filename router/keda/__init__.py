"""Generated from proto/router/keda by ./run gen; never edited."""
