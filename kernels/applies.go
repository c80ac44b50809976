package kernels

import "github.com/deepwell/deepwell/ir"

// OnCPU is the condition of a kernel that XLA:CPU takes for every operation of its kinds.
func OnCPU(why string) func(*Selector, *ir.Op) (string, bool) {
	return func(s *Selector, _ *ir.Op) (string, bool) { return why, s.Arch() == "cpu" }
}

// OnGPU is the same for every GPU.
func OnGPU(why string) func(*Selector, *ir.Op) (string, bool) {
	return func(s *Selector, _ *ir.Op) (string, bool) {
		return why, s.Arch() != "cpu" && s.Arch() != ""
	}
}

// Attending is the condition of a kernel that a selector takes for some attentions, by its name.
func Attending(name string) func(*Selector, *ir.Op) (string, bool) {
	return func(s *Selector, op *ir.Op) (string, bool) {
		if s == nil {
			return "", false
		}
		kernel, why := s.Attends(op)
		return why, kernel == name
	}
}
