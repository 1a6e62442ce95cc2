"""The parts of client processes that record what they see."""
