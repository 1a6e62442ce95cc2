-- LOCKS ACCESS EXCLUSIVE: job, workflow_edge
-- Lets a job wait for nodes that it adds to its workflow (docs/decisions/0073-a-job-waits-for-the-nodes-it-adds.md).
-- These nodes have higher numbers than the node that waits.
ALTER TABLE windrow.workflow_edge
    DROP CONSTRAINT workflow_edge_check,
    ADD CONSTRAINT waits_for_another_node CHECK (parent <> node) NOT VALID;

-- These are the triggers of 0014_groups.sql, except that they also see a job that gives its slot up because it is
-- blocked: such a job has no time.
DROP TRIGGER group_note_update ON windrow.job;
CREATE TRIGGER group_note_update AFTER UPDATE ON windrow.job FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL
        AND (
            OLD.group_slot IS NOT NULL
            OR NEW.run_at < 'infinity' AND (NEW.visible_at = 'infinity' OR OLD.visible_at = 'infinity')
        )
    )
    EXECUTE FUNCTION windrow.note_group();
DROP TRIGGER group_fill_update ON windrow.job;
CREATE CONSTRAINT TRIGGER group_fill_update AFTER UPDATE ON windrow.job DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (
        NEW.group_key IS NOT NULL AND NEW.group_slot IS NULL
        AND (
            OLD.group_slot IS NOT NULL
            OR NEW.run_at < 'infinity' AND (NEW.visible_at = 'infinity' OR OLD.visible_at = 'infinity')
        )
    )
    EXECUTE FUNCTION windrow.fill_noted_groups();
