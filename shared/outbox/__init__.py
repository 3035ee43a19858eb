"""Publishing: events become rows of the outbox in the transaction that decided them."""
