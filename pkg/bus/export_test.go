package bus

// Waiting counts the items that no batch has yet.
func (o *Outbox[T]) Waiting() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.queue)
}

// Seal closes a batch at once; Run must not be running.
func (o *Outbox[T]) Seal() bool { return o.seal() }

// Sealed counts the items whose batch is closed and not yet published.
func (o *Outbox[T]) Sealed() int { return o.backlog.stats().items }
