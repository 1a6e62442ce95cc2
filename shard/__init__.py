"""Everything about one shard: vocabulary, store, statements, migrations. Contains all SQL, and no gRPC."""
