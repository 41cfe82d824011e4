"""The master: pure state machine (`state`, `formation`, `sessions`), gRPC shell (`shell`, `service`), children."""
