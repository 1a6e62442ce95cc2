-- No queue is made or changed meanwhile; those that wait to be will find their orgs as they are then. Enqueues go on.
SET LOCAL lock_timeout = '100ms';
SET LOCAL idle_in_transaction_session_timeout = '2s';
LOCK TABLE windrow.queue IN SHARE ROW EXCLUSIVE MODE
