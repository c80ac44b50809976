package dryrun

// A Budget is what is to be trained, and what devices cost.
type Budget struct {
	Tokens  float64 `json:"tokens"`  // to train on
	Price   float64 `json:"price"`   // of a device for an hour
	Devices int     `json:"devices"` // that are paid for
	Batch   float64 `json:"batch"`   // tokens of a step
}

// A Bill is what a budget comes to.
type Bill struct {
	Steps float64 `json:"steps"`
	Days  float64 `json:"days"`
	Money float64 `json:"money"` // in the unit of the price
}

// Bill is the budget's days and dollars if a step takes that many seconds. It does not include
// restarts, evaluation and checkpoints.
func (b Budget) Bill(step float64) Bill {
	if b.Batch <= 0 {
		return Bill{}
	}
	steps := b.Tokens / b.Batch
	hours := steps * step / 3600
	return Bill{Steps: steps, Days: hours / 24, Money: hours * float64(b.Devices) * b.Price}
}
