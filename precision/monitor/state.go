package monitor

import (
	"cmp"
	"encoding/json"
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// version is the version of the JSON form.
const version = 1

// state is the JSON form of a monitor, without its options: they belong to the program that runs.
// Names are part of the checkpoint format.
type state struct {
	Version int         `json:"version"`
	Losses  []float64   `json:"losses,omitempty"`
	Norms   []float64   `json:"norms,omitempty"` // logarithms
	Shared  bool        `json:"shared,omitzero"`
	Suspect bool        `json:"doubt,omitzero"`
	Sites   []siteState `json:"sites,omitempty"`
}

// siteState is the JSON form of a site; series and GEMMs are stored by name, so that signals may be
// added.
type siteState struct {
	Layer  int                   `json:"layer"`
	Name   string                `json:"name"`
	Series map[string]*series    `json:"series,omitempty"`
	GEMMs  map[string]*gemmState `json:"products,omitempty"`
}

// MarshalJSON writes history and falls: the same bytes for the same monitor.
func (t *Monitor) MarshalJSON() ([]byte, error) {
	st := state{Version: version, Losses: t.losses, Norms: t.norms, Shared: t.shared,
		Suspect: t.suspect}
	for _, s := range t.sites {
		one := siteState{Layer: s.layer, Name: s.name, Series: map[string]*series{},
			GEMMs: map[string]*gemmState{}}
		for i := range s.series {
			if se := &s.series[i]; len(se.Values) > 0 || se.Bad+se.Low > 0 || se.Format != "" {
				one.Series[placeName(i)] = se
			}
		}
		for i, name := range gemms {
			if p := &s.gemms[i]; p.Wait > 0 {
				one.GEMMs[name] = p
			}
		}
		st.Sites = append(st.Sites, one)
	}
	return json.Marshal(st)
}

// UnmarshalJSON reads what MarshalJSON wrote, into a monitor whose options stay. Everything is
// checked: a checkpoint may be damaged.
func (t *Monitor) UnmarshalJSON(data []byte) error {
	var st state
	if err := strictjson.Decode(data, &st); err != nil {
		return damaged("it is not JSON of a watch").Wrap(err)
	}
	if st.Version != version {
		return diag.New(diag.CheckpointVersion, "the history of precision has version %d; this binary"+
			" reads %d", st.Version, version)
	}
	fresh := &Monitor{options: t.options, losses: st.Losses, norms: st.Norms,
		shared: st.Shared, suspect: st.Suspect}
	if max(len(st.Losses), len(st.Norms)) > remembered || len(st.Losses) != len(st.Norms) {
		return damaged("it has %d losses and %d norms", len(st.Losses), len(st.Norms))
	}
	for _, one := range st.Sites {
		s, err := one.site()
		if err != nil {
			return err
		}
		fresh.sites = append(fresh.sites, s)
	}
	order := func(a, b *site) int {
		return cmp.Or(cmp.Compare(a.layer, b.layer), cmp.Compare(a.name, b.name))
	}
	for i := 1; i < len(fresh.sites); i++ {
		if order(fresh.sites[i-1], fresh.sites[i]) >= 0 {
			return damaged("%s of layer %d is out of order", fresh.sites[i].name, fresh.sites[i].layer)
		}
	}
	*t = *fresh
	return nil
}

// damaged is the error of a history that cannot be read.
func damaged(format string, args ...any) *diag.Error {
	return diag.New(diag.CheckpointDamaged, "the history of precision cannot be read: "+format,
		args...)
}

// site checks and returns a site.
func (st *siteState) site() (*site, error) {
	s := &site{layer: st.Layer, name: st.Name}
	for name, se := range st.Series {
		i := placeOf(name)
		if i < 0 || se == nil || len(se.Values) > window || min(se.Bad, se.Low) < 0 ||
			!known(se.Format, true) {
			return nil, damaged("series %q of %s, layer %d", name, st.Name, st.Layer)
		}
		s.series[i] = *se
	}
	for name, p := range st.GEMMs {
		i := slices.Index(gemms, name)
		if i < 0 || p == nil || p.Wait < 1 || p.Cause != "" && placeOf(p.Cause) < 0 {
			return nil, damaged("product %q of %s, layer %d", name, st.Name, st.Layer)
		}
		for _, d := range p.Fallen {
			if d.GEMM != name || d.Layer != st.Layer || d.Linear != st.Name ||
				!known(d.From, false) || !known(d.To, false) {
				return nil, damaged("a fall of %s of %s, layer %d", name, st.Name, st.Layer)
			}
		}
		p.Wait, p.Since = min(p.Wait, 1<<30), min(p.Since, math.MaxInt32)
		s.gemms[i] = *p
	}
	return s, nil
}

// known reports whether a format exists; none allows the empty one.
func known(format string, none bool) bool {
	return format == bf16 || dtype.Format(format).Quantized() || none && format == ""
}
