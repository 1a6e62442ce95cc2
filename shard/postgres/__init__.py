"""One Postgres server: connections, statements, schema, leader lock."""
