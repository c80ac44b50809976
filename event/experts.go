package event

import "fmt"

// Experts says what the experts of each layer had to do in a step.
type Experts struct {
	Step   int          `json:"step"`
	Layers []ExpertLoad `json:"layers"`
}

// An ExpertLoad is the load of the experts of one layer in a step.
type ExpertLoad struct {
	Layer   int     `json:"layer"`
	Tokens  []int64 `json:"tokens"`            // that chose each expert, the dropped ones included
	Busiest float64 `json:"busiest"`           // the largest of them, by the mean
	Idlest  float64 `json:"idlest"`            // the smallest, by the mean
	Dropped float64 `json:"dropped,omitempty"` // choices that a capacity factor dropped
	Entropy float64 `json:"entropy"`           // of the router, mean over tokens, in nats
}

// RouterCollapsed says that the router of a layer sends nearly everything to a few experts, or
// nothing to some: Busiest and Idlest are averages over steps, by the mean load.
type RouterCollapsed struct {
	Step    int     `json:"step"`
	Layer   int     `json:"layer"`
	Busiest float64 `json:"busiest"`
	Idlest  float64 `json:"idlest"`
}

// Line implements Event: the worst layer of a step.
func (e Experts) Line() string {
	if len(e.Layers) == 0 {
		return ""
	}
	worst, dropped := e.Layers[0], 0.0
	for _, l := range e.Layers {
		if l.Busiest > worst.Busiest {
			worst = l
		}
		dropped += l.Dropped
	}
	text := fmt.Sprintf("step %d  experts: busiest %.2f, idlest %.2f of the mean in layer %d", e.Step,
		worst.Busiest, worst.Idlest, worst.Layer)
	if dropped > 0 {
		text += fmt.Sprintf(", %.0f choices dropped", dropped)
	}
	return text
}

// Line implements Event.
func (r RouterCollapsed) Line() string {
	return fmt.Sprintf("step %d  the router of layer %d has collapsed: its busiest expert has %.2f "+
		"times the mean load, its idlest %.2f; raise experts.aux_loss, or experts.bias_rate", r.Step,
		r.Layer, r.Busiest, r.Idlest)
}
