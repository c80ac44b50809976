package event

import "fmt"

// KernelDiffers says that a kernel of our own is not used, since on this GPU it does not compute
// what its plain form does: the norm of the difference over the plain form's, and its limit, or why
// the kernel did not run at all.
type KernelDiffers struct {
	Kernel string  `json:"kernel"`
	Spec   string  `json:"spec"` // of the call that was compared
	Apart  float64 `json:"apart"`
	Limit  float64 `json:"limit"`
	Why    string  `json:"why,omitempty"`
}

// Line implements Event.
func (k KernelDiffers) Line() string {
	if k.Why != "" {
		return fmt.Sprintf("the kernel %q does not run on this GPU (%s); its plain form is used",
			k.Kernel, k.Why)
	}
	return fmt.Sprintf("the kernel %q differs on this GPU from its plain form by %.2g of %.2g;"+
		" the plain form is used", k.Kernel, k.Apart, k.Limit)
}
