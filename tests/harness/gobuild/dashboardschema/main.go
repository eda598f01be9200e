// Checks Grafana dashboards against Grafana's schema: dashboard-schema FILE...
//
// Unknown, missing and mistyped fields are printed, those of panels and queries included; the exit status is then 1.
package main

import (
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

func faults(file string) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var found dashboard.Dashboard
	if err := found.UnmarshalJSONStrict(content); err != nil && err.Error() != "" {
		return err
	}
	return found.Validate()
}

func main() {
	runtime := cog.NewRuntime()
	runtime.RegisterPanelcfgVariant(stat.VariantConfig())
	runtime.RegisterPanelcfgVariant(timeseries.VariantConfig())
	runtime.RegisterDataqueryVariant(prometheus.VariantConfig())
	status := 0
	for _, file := range os.Args[1:] {
		// A list of faults that is empty is an error to Go, too.
		if err := faults(file); err != nil && err.Error() != "" {
			fmt.Fprintf(os.Stderr, "%s:\n%v\n", file, err)
			status = 1
		}
	}
	os.Exit(status)
}
