package main

import (
	"context"
	"slices"
	"strings"

	danube "github.com/danube-messaging/danube-go"
)

const (
	firstSchema  = `{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"]}`
	secondSchema = `{"type":"object","properties":{"id":{"type":"integer"},"note":{"type":"string"}},"required":["id"]}`
	worseSchema  = `{"type":"object","properties":{"id":{"type":"string"}},"required":["id"]}`
)

func subjectOf(topic string) string {
	return strings.ReplaceAll(strings.TrimPrefix(topic, "/"), "/", "-")
}

func register(ctx context.Context, client *danube.DanubeClient, subject, definition string) (uint64, error) {
	return client.Schema().RegisterSchema(subject).WithType(danube.SchemaTypeJSONSchema).
		WithSchemaData([]byte(definition)).Execute(ctx)
}

func schemaSubject(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	subject := subjectOf(topic)
	id, err := register(ctx, client, subject, firstSchema)
	if err != nil {
		return err
	}
	if again, err := register(ctx, client, subject, firstSchema); err != nil || again != id {
		return ensure(false, "the same definition got id %d, %v", again, err)
	}
	producer, err := reliable(ctx, client, topic, "p", func(b *danube.ProducerBuilder) *danube.ProducerBuilder {
		return b.WithSchemaSubject(subject)
	})
	if err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	defer r.consumer.Close()
	if _, err := producer.Send(ctx, []byte(`{"id":1}`), nil); err != nil {
		return err
	}
	message, err := r.next()
	if err != nil {
		return err
	}
	return ensure(
		message.GetSchemaId() == id && message.GetSchemaVersion() == 1,
		"the message names schema %d version %d", message.GetSchemaId(), message.GetSchemaVersion(),
	)
}

func schemaVersions(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	subject := subjectOf(topic)
	for _, definition := range []string{firstSchema, secondSchema} {
		if _, err := register(ctx, client, subject, definition); err != nil {
			return err
		}
	}
	versions, err := client.Schema().ListVersions(ctx, subject)
	if err != nil || !slices.Equal(versions, []uint32{1, 2}) {
		return ensure(false, "versions are %v, %v", versions, err)
	}
	producer, err := reliable(ctx, client, topic, "p", func(b *danube.ProducerBuilder) *danube.ProducerBuilder {
		return b.WithSchemaVersion(subject, 1)
	})
	if err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	defer r.consumer.Close()
	if _, err := producer.Send(ctx, []byte(`{"id":1}`), nil); err != nil {
		return err
	}
	message, err := r.next()
	if err != nil {
		return err
	}
	return ensure(message.GetSchemaVersion() == 1, "version %d came", message.GetSchemaVersion())
}

func schemaCompatibility(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	subject := subjectOf(topic)
	if _, err := register(ctx, client, subject, firstSchema); err != nil {
		return err
	}
	json := danube.SchemaTypeJSONSchema
	fine, err := client.Schema().CheckCompatibility(ctx, subject, []byte(secondSchema), json, nil)
	if err != nil || !fine.GetIsCompatible() {
		return ensure(false, "an optional property is refused: %v, %v", fine.GetErrors(), err)
	}
	worse, err := client.Schema().CheckCompatibility(ctx, subject, []byte(worseSchema), json, nil)
	if err != nil || worse.GetIsCompatible() {
		return ensure(false, "a changed type is taken, %v", err)
	}
	_, err = register(ctx, client, subject, worseSchema)
	return ensure(err != nil, "an incompatible version was registered")
}
