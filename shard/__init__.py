"""Everything about one shard: vocabulary, store, statements, migrations. Knows SQL; knows no gRPC."""
