"""GRPC messages on the hot way: SendMessage, ReceiveMessages, Ack, Nack."""
