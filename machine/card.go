package machine

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// A Card is one kind of accelerator, as the catalogue knows it. Zero values mean "not known",
// except where a field says otherwise.
type Card struct {
	Name  string // as the command line spells it: gb200
	Title string // as people write it: GB200

	// ComputeCapability has the letter of the instructions that only this chip has, which XLA
	// compiles for: 10.0a. Arch is the same without it: sm_100.
	ComputeCapability string
	Arch              string

	MemoryBytes     int64 // what the package has
	UsableBytes     int64 // what CUDA gives to a program
	MemoryBandwidth int64 // bytes a second

	Peak  Peaks
	MXFP8 bool // has tensor-core products with a scale for each block of 32
	NVFP4 bool // has them for FP4 with a scale for each block of 16

	NVLink       int64 // bytes a second in one direction; 0 means that it has none
	NVLinkDomain int   // GPUs that reach each other by NVLink
	GPUsPerHost  int
	NIC          int64 // bytes a second in one direction that each GPU has of the network

	PCIeGen   int // of the link to the host
	PCIeLanes int
	TDPWatts  int

	aliases []string
	device  device
}

// Peaks are the rates of dense products, in floating-point operations a second, with no account of
// structured sparsity. A format that the card lacks, or whose rate nobody published, is 0.
type Peaks struct {
	BF16, FP8, MXFP8, NVFP4 float64
}

// Cards lists the catalogue, newest chips first.
func Cards() []Card { return catalogue() }

// FindCard finds a card by its name or by any other spelling in use: "b200", "B200-SXM" and the
// driver's "NVIDIA B200" are one card.
func FindCard(name string) (Card, error) {
	cards := catalogue()
	wanted := fold(name)
	for _, c := range cards {
		if wanted == c.Name || slices.Contains(c.aliases, wanted) {
			return c, nil
		}
	}
	names := make([]string, len(cards))
	for i, c := range cards {
		names[i] = c.Name
	}
	err := diag.New(diag.CardUnknown, "no card is called %q", name).
		Try("take one of %s", strings.Join(names, ", "))
	if near := nearestCard(wanted, cards); near != "" {
		err.What += "; did you mean \"" + near + "\"?"
	}
	return Card{}, err
}

func nearestCard(wanted string, cards []Card) string {
	owner := map[string]string{}
	var spellings []string
	for _, c := range cards {
		for _, s := range append([]string{c.Name}, c.aliases...) {
			owner[s] = c.Name
			spellings = append(spellings, s)
		}
	}
	return owner[diag.Nearest(wanted, spellings)]
}

// fold brings a spelling to the form of the catalogue: small letters and digits only, without the
// maker's name.
func fold(name string) string {
	name = strings.Map(func(r rune) rune {
		switch {
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		}
		return -1
	}, name)
	return strings.TrimPrefix(name, "nvidia")
}
