package program

// A Role says what an argument or a result of a program is. It is set where graphs are built, so
// that nobody has to read it out of a name.
type Role string

// The roles.
const (
	Batch        Role = "batch"         // tokens, labels, random bits: the host's inputs
	Scalar       Role = "scalar"        // a number of the whole step: learning rate, commit, norm
	Param        Role = "param"         // the master copy of a parameter
	Moment       Role = "moment"        // optimizer state of a parameter beside its master
	Copy         Role = "copy"          // compute copy of a parameter: converted, gathered, quantized
	Gradient     Role = "gradient"      // of a parameter, accumulated over microbatches
	PeerGradient Role = "peer_gradient" // of a parameter that another pipeline rank has as well
	Activation   Role = "activation"    // what one pipeline stage sends to the next
	Seed         Role = "seed"          // the gradient of an activation, which a stage sends back
	LossSeed     Role = "loss_seed"     // the gradient of the loss by itself: 1
	Residual     Role = "residual"      // saved by a forward pass for its backward pass
	Loss         Role = "loss"          // of a microbatch
	Stat         Role = "stat"          // what monitors read: amax, scales, quantization errors
)

// prefixes distinguish the arrays of one parameter by name. They are written here only: code that
// wants to know what an array is asks for its role.
var prefixes = map[Role]string{Copy: "c.", Gradient: "g.", PeerGradient: "o."}

// Of is the name of the array that has a role for a parameter: Gradient.Of("w") is "g.w".
func (r Role) Of(param string) string { return prefixes[r] + param }

// Next is the name, inside a graph, of the result that replaces an argument.
func Next(argument string) string { return "next." + argument }

// A Meaning is what a value is outside its graph.
type Meaning struct {
	Role Role
	// Param names the parameter that a master, moment, copy or gradient belongs to; "" of all others.
	Param string
	// Replaces names the argument that a result replaces: a new master replaces the old one.
	Replaces string
}

// For is the meaning of what has a role for a parameter.
func (r Role) For(param string) Meaning { return Meaning{Role: r, Param: param} }

// Replacing is the meaning of a result that takes the place of an argument of the same meaning.
func (m Meaning) Replacing(argument string) Meaning {
	m.Replaces = argument
	return m
}
