package engine

// Elsewhere lets an engine take its own devices for devices of another process.
func (e *Engine) Elsewhere(ids ...int) {
	for _, id := range ids {
		e.devices[id] = nil
	}
}
