package engine

// Elsewhere lets an engine take devices of its own for those of another process of its client.
func (e *Engine) Elsewhere(ids ...int) {
	for _, id := range ids {
		e.devices[id] = nil
	}
}
