package monitor

// Fallen returns the falls that are in effect, for each GEMM in the order in which they were made.
func (t *Monitor) Fallen() []Decision {
	var list []Decision
	for _, s := range t.sites {
		for i := range s.gemms {
			list = append(list, s.gemms[i].Fallen...)
		}
	}
	return list
}
