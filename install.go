package deepwell

import (
	"context"

	"github.com/deepwell/deepwell/plugin"
)

// Install brings an engine onto this machine, from the user's package index or from wheels.
func (e *Env) Install(ctx context.Context, name string, from []string) (*plugin.Bundle, error) {
	v := e.begin(ctx, "install")
	in := &plugin.Installer{Dir: e.Engines, From: from, Events: e.Events}
	bundle := get(v, "fetch, check and unpack", func() (*plugin.Bundle, error) {
		return in.Install(ctx, name)
	})
	return bundle, v.err
}
