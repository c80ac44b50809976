package program

// A Role says what an argument or a result of a program is. It is set where graphs are built, so
// that nobody has to read it out of a name.
type Role string

// The roles.
const (
	Batch        Role = "batch"         // tokens, labels, noise: what the host gives for a microbatch
	Scalar       Role = "scalar"        // a number of the whole step: rate, commit, norm
	Param        Role = "param"         // the master copy of a parameter
	Moment       Role = "moment"        // what the optimizer keeps of a parameter beside its master
	Copy         Role = "copy"          // what the model computes with in the place of a parameter
	Gradient     Role = "gradient"      // of a parameter, which microbatches add up
	PeerGradient Role = "peer_gradient" // of a parameter that another pipeline rank has as well
	Activation   Role = "activation"    // what one pipeline stage sends to the next
	Seed         Role = "seed"          // the gradient of an activation, which a stage sends back
	LossSeed     Role = "loss_seed"     // the gradient of the loss by itself: 1
	Residual     Role = "residual"      // what a forward pass keeps for its backward pass
	Loss         Role = "loss"          // of a microbatch
	Stat         Role = "stat"          // what monitors read: amax, scales, errors of rounding
)

// prefixes tell the arrays of one parameter apart by name. They are written here only: whoever
// wants to know what an array is asks for its role.
var prefixes = map[Role]string{Copy: "c.", Gradient: "g.", PeerGradient: "o."}

// Of is the name of the array that has a role for a parameter.
func (r Role) Of(param string) string { return prefixes[r] + param }

// Next is the name inside a graph of the result that takes the place of an argument.
func Next(argument string) string { return "next." + argument }

// A Meaning is what a value is outside its graph.
type Meaning struct {
	Role Role
	// Param names the parameter that a master, moment, copy or gradient belongs to; "" of all others.
	Param string
	// Replaces names the argument whose place a result takes: a new master that of the old one.
	Replaces string
}

// For is the meaning of what has a role for a parameter.
func (r Role) For(param string) Meaning { return Meaning{Role: r, Param: param} }

// Replacing is the meaning of a result that takes the place of an argument of the same meaning.
func (m Meaning) Replacing(argument string) Meaning {
	m.Replaces = argument
	return m
}
